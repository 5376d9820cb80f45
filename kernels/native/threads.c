/* A small team of threads for the items of one kernel at a time.
 *
 * The caller and its helpers claim items from one counter, so nobody waits for a thread that has not come: a helper
 * that sleeps, or has lost its core, costs nothing but the item that it holds. Helpers look out for the next job for a
 * moment, since a step is a string of them, and then sleep. How many there are, and on which cores, may change at any
 * time, from any thread, in the middle of a job too.
 *
 * A helper's core may be borrowed from another process, whose state lies in shared memory (`Lender`). Every claim looks
 * there: when the lender turns busy its core is left after the item in hand. A core has one borrower at a time.
 *
 * A process may also wish for a core while its owner computes. An owner that gives way sees the wish at its next item,
 * sleeps until the wish has ended, and only then goes on; meanwhile the one who asked, and nobody else, may borrow the
 * core. A wish ends by itself after a while, so whoever dies while asking need not be cleaned up after, and an owner
 * stands aside for a share of its time only, whoever asks.
 *
 * The counter holds the number of the job above that of the next item, and every claim is a compare-and-swap. The caller
 * closes the counter, describes the next job, and opens it with the next number. So what a helper has read of a job is
 * still true if its claim succeeds, and one that comes late cannot take an item of one job for that of another.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "threads.h"
#include "vector.h"

#define MOST_HELPERS 31

#ifdef __linux__
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define ITEM_BITS 32
#define CLOSED 0xffffffffull /* in place of an item: above every count */
#define LOOK_OUT_NS 80000   /* of a helper, for the next job: longer than what lies between two of a step */
#define WAIT_NS 150000      /* of the caller, for an item that a helper holds, until it fetches that helper */
#define SHORTEST_REST_NS 1000000 /* of a helper that had to be fetched; twice as long if it happens again soon */
#define LONGEST_REST_NS 4000000 /* so that on a core with other work all the time a few percent are lost, no more */
#define LONGEST_WISH_NS 100000000 /* see LONGEST_WISH_S in engine/cores.py */
#define ASIDE_FOR_WORKED 3 /* an owner stands aside at most so many times as long as it works, */
#define MOST_ASIDE_NS 300000000 /* and for so long at a stretch; */
#define LEAST_ASIDE_NS 5000000  /* it does not begin to if this much is not left to it */
#define WISH_NAME_BITS 16
#define STACK_BYTES (1 << 20)
#define LINE _Alignas(64) /* what different threads write lies in different cache lines */

/* A core on the board that the processes of a machine share, see engine/cores.py. */
typedef struct {
    atomic_uint_least64_t busy; /* a byte for each of its owners, see below; 0: idle */
    atomic_uint borrower;       /* whose helper is there, 0 for nobody's */
    atomic_uint wishes_ended;   /* how many: owners sleep on it while they stand aside */
    atomic_uint_least64_t wish; /* until when it lasts, in us, << WISH_NAME_BITS | who wishes; 0: there is none */
} Lender;

#define EVERY_BYTE 0x0101010101010101ull
#define GIVES_WAY 2 /* of an owner: busy, and will stand aside for a wish; 1: busy */
#define ASIDE 3     /* does so now */

typedef struct {
    LINE atomic_uint asleep; /* and what it sleeps on */
    atomic_bool working;     /* it has, or is about to claim, an item */
    atomic_bool away;        /* not on its own core: the caller fetched it */
    atomic_int core;
    _Atomic(Lender *) lender; /* null: the core is there for this helper */
    Lender *held;             /* the helper's own: which lender it is the borrower of, */
    unsigned held_as;         /* and by which name */
    atomic_llong worked_ns;
    pthread_t thread;
    bool exists;
    atomic_llong rests_until;
    int64_t rest_ns; /* the caller's own: the latest rest */
} Helper;

static struct {
    LINE atomic_uint_least64_t ticket; /* job << ITEM_BITS | next item */
    LINE atomic_uint done;             /* items that helpers have done; the caller may sleep on it */
    atomic_uint waiting;               /* whether it does */
    LINE _Atomic(Work) work;
    _Atomic(void *) context;
    atomic_int_least64_t count;
    atomic_bool taken; /* by a caller; another one works alone */
    LINE atomic_int helpers;
    atomic_uint name; /* of this process, as a borrower */
    _Atomic(Lender *) own; /* the core of the callers, who give way there; null: they do not */
    atomic_uint own_seat;
    atomic_llong aside_ns;   /* for how long they have stood aside, in all */
    atomic_llong aside_left; /* for how long they might, */
    atomic_llong aside_at;   /* at this time */
    Helper team[MOST_HELPERS];
    pthread_mutex_t changing;
} state = {.changing = PTHREAD_MUTEX_INITIALIZER};

static _Thread_local bool helping; /* this is a helper's thread */

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

static void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void sleep_on(atomic_uint *word, unsigned value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void wake(atomic_uint *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0); }

/* Those two are among threads; these among processes. */
static void sleep_shared(atomic_uint *word, unsigned value, int64_t most_ns) {
    const struct timespec most = {most_ns / 1000000000, most_ns % 1000000000};
    syscall(SYS_futex, word, FUTEX_WAIT, value, &most, NULL, 0);
}

static void wake_all_shared(atomic_uint *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }

static int bind_to(pthread_t thread, int core) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(core, &cores);
    return pthread_setaffinity_np(thread, sizeof cores, &cores);
}

/* For how long a wish is in force. One that claims to be for longer than any may is no wish at all. */
static int64_t time_left(uint64_t wish, int64_t now) {
    const int64_t left = (int64_t)(wish >> WISH_NAME_BITS) * 1000 - now;
    return left > 0 && left <= LONGEST_WISH_NS ? left : 0;
}

/* Whether its owners let this process have the core: all are idle, or stand aside for our wish. */
static bool is_free(const Lender *lender) {
    const uint64_t busy = atomic_load(&lender->busy);
    if (!busy) return true;
    if (busy != (busy & EVERY_BYTE) * ASIDE) return false;
    return (atomic_load(&lender->wish) & ((1 << WISH_NAME_BITS) - 1)) == atomic_load(&state.name);
}

/* Whether this helper is to take part now. */
static bool wanted(const Helper *helper) {
    if (helper - state.team >= atomic_load(&state.helpers) || atomic_load(&helper->away)) return false;
    Lender *lender = atomic_load(&helper->lender);
    return !lender || is_free(lender);
}

/* Whether it could: its core's owners let it, and neither has another process borrowed it, nor is it so full of other
 * work that the helper was not run. */
static bool available(const Helper *helper) {
    const int64_t rests_until = atomic_load(&helper->rests_until);
    if (rests_until && now_ns() < rests_until) return false;
    Lender *lender = atomic_load(&helper->lender);
    if (!lender) return true;
    const unsigned borrower = atomic_load(&lender->borrower);
    return is_free(lender) && (!borrower || borrower == atomic_load(&state.name));
}

static void leave_core(Helper *me) {
    unsigned name = me->held_as;
    if (me->held) atomic_compare_exchange_strong(&me->held->borrower, &name, 0);
    me->held = NULL;
}

static bool enter_core(Helper *me) {
    Lender *lender = atomic_load(&me->lender);
    if (lender != me->held) leave_core(me);
    if (!lender) return true;
    unsigned nobody = 0;
    const unsigned name = atomic_load(&state.name);
    if (!atomic_compare_exchange_strong(&lender->borrower, &nobody, name) && nobody != name) return false;
    me->held = lender, me->held_as = name;
    return true;
}

static uint64_t current_job(void) { return atomic_load(&state.ticket) >> ITEM_BITS; }

/* Work on the next item of the job that runs; false if there is none. */
static bool do_one(void) {
    uint64_t ticket = atomic_load(&state.ticket);
    for (;;) {
        Work work = atomic_load(&state.work);
        void *context = atomic_load(&state.context);
        int64_t item = ticket & CLOSED;
        if (item >= atomic_load(&state.count)) return false;
        if (!atomic_compare_exchange_weak(&state.ticket, &ticket, ticket + 1)) continue;
        work(context, item);
        return true;
    }
}

static void take_part(Helper *me) {
    int64_t began = 0;
    if (!wanted(me) || !enter_core(me)) return;
    atomic_store(&me->working, true);
    while (wanted(me)) {
        if (!began) began = now_ns();
        if (!do_one()) break;
        atomic_fetch_add(&state.done, 1);
        if (atomic_load(&state.waiting)) wake(&state.done);
    }
    atomic_store(&me->working, false);
    if (began) atomic_fetch_add_explicit(&me->worked_ns, now_ns() - began, memory_order_relaxed);
}

static void *help(void *argument) {
    Helper *me = argument;
    helping = true;
    for (;;) {
        const uint64_t job = current_job();
        take_part(me);
        const int64_t until = now_ns() + LOOK_OUT_NS;
        while (current_job() == job && wanted(me) && now_ns() < until) pause_briefly();
        if (current_job() != job && wanted(me)) continue;
        leave_core(me);
        atomic_store(&me->asleep, 1);
        while (atomic_load(&me->asleep) && !(current_job() != job && wanted(me))) sleep_on(&me->asleep, 1);
        atomic_store(&me->asleep, 0);
    }
    return NULL;
}

/* Bring those who may work back to their cores, and wake them. */
static void call_helpers(void) {
    const int helpers = atomic_load(&state.helpers);
    for (Helper *helper = state.team; helper < state.team + helpers; helper++) {
        if (!available(helper)) continue;
        if (atomic_load(&helper->away) && !bind_to(helper->thread, atomic_load(&helper->core)))
            atomic_store(&helper->away, false);
        if (atomic_load(&helper->asleep) && atomic_exchange(&helper->asleep, 0)) wake(&helper->asleep);
    }
}

/* Helpers that hold an item but got no time on their core for too long may go on with it on this one. On a core with
 * other work to do that would happen every few milliseconds, and be no help: they rest, the longer the more often. */
static void fetch_helpers(void) {
    const int core = sched_getcpu();
    const int64_t now = now_ns();
    for (Helper *helper = state.team; core >= 0 && helper < state.team + MOST_HELPERS; helper++)
        if (atomic_load(&helper->working)) {
            atomic_store(&helper->away, true); /* before it can find itself here with more to do */
            bind_to(helper->thread, core);
            const int64_t longer = helper->rest_ns < LONGEST_REST_NS ? 2 * helper->rest_ns : LONGEST_REST_NS;
            helper->rest_ns = now - atomic_load(&helper->rests_until) > 4 * helper->rest_ns ? SHORTEST_REST_NS : longer;
            atomic_store(&helper->rests_until, now + helper->rest_ns);
        }
}

/* Wait until helpers have done this many items. */
static void wait_for(unsigned items) {
    int64_t until = 0;
    while (atomic_load(&state.done) != items) {
        if (!until) until = now_ns() + WAIT_NS;
        if (now_ns() > until) {
            fetch_helpers();
            atomic_store(&state.waiting, 1);
            for (unsigned done; (done = atomic_load(&state.done)) != items;) sleep_on(&state.done, done);
            atomic_store(&state.waiting, 0);
            return;
        }
        pause_briefly();
    }
}

/* For how long callers might stand aside now: it grows while they work. */
static int64_t aside_left(int64_t now) {
    const int64_t worked = now - atomic_load(&state.aside_at);
    if (worked >= MOST_ASIDE_NS) return MOST_ASIDE_NS;
    const int64_t left = atomic_load(&state.aside_left) + ASIDE_FOR_WORKED * worked;
    return left < MOST_ASIDE_NS ? left : MOST_ASIDE_NS;
}

static void stand_aside(Lender *own) {
    const int64_t began = now_ns();
    int64_t now = began, left = aside_left(began);
    if (left < LEAST_ASIDE_NS) return;
    atomic_uchar *seat = (atomic_uchar *)own + atomic_load(&state.own_seat);
    bool aside = false;
    while (left > 0) {
        const unsigned ended = atomic_load(&own->wishes_ended);
        uint64_t wish = atomic_load(&own->wish);
        const int64_t lasts = time_left(wish, now);
        if (!lasts) {
            if (wish) atomic_compare_exchange_strong(&own->wish, &wish, 0); /* of one who cannot any more */
            break;
        }
        if (!aside) atomic_store(seat, ASIDE);
        aside = true;
        sleep_shared(&own->wishes_ended, ended, lasts < left ? lasts : left);
        const int64_t before = now;
        now = now_ns();
        left -= now - before;
    }
    if (!aside) return;
    atomic_store(seat, GIVES_WAY);
    atomic_store(&state.aside_left, left);
    atomic_store(&state.aside_at, now);
    atomic_fetch_add(&state.aside_ns, now - began);
}

void pd_give_way(void) {
    Lender *own = atomic_load_explicit(&state.own, memory_order_acquire);
    if (own && !helping && atomic_load_explicit(&own->wish, memory_order_relaxed)) stand_aside(own);
}

int pd_may_be_helped(void) {
    const int helpers = atomic_load(&state.helpers);
    for (int i = 0; i < helpers; i++)
        if (available(state.team + i)) return 1;
    return 0;
}

void pd_parallel(Work work, void *context, int64_t count) {
    if (count < 2 || count >= (int64_t)CLOSED || !pd_may_be_helped() || atomic_exchange(&state.taken, true)) {
        for (int64_t item = 0; item < count; item++) {
            pd_give_way();
            work(context, item);
        }
        return;
    }
    const uint64_t last = current_job();
    atomic_store(&state.ticket, last << ITEM_BITS | CLOSED);
    atomic_store(&state.done, 0);
    atomic_store(&state.work, work);
    atomic_store(&state.context, context);
    atomic_store(&state.count, count);
    atomic_store(&state.ticket, (last + 1) << ITEM_BITS);
    call_helpers();
    int64_t mine = 0;
    for (pd_give_way(); do_one(); pd_give_way()) mine++;
    wait_for((unsigned)(count - mine));
    atomic_store(&state.taken, false);
}

/* A forked child has no helpers, whatever they were doing. */
static void before_fork(void) { pthread_mutex_lock(&state.changing); }
static void after_fork(void) { pthread_mutex_unlock(&state.changing); }
static void in_child(void) {
    atomic_store(&state.helpers, 0);
    atomic_store(&state.own, NULL);
    atomic_store(&state.taken, false);
    atomic_store(&state.waiting, 0);
    memset(state.team, 0, sizeof state.team);
    pthread_mutex_unlock(&state.changing);
}

/* A helper's thread on its core. It blocks all signals: they are for the thread that waits for them. */
static bool start(Helper *helper, int core) {
    if (core < 0 || core >= CPU_SETSIZE) return false;
    atomic_store(&helper->core, core);
    atomic_store(&helper->away, false);
    if (helper->exists) return !bind_to(helper->thread, core);
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(core, &cores);
    sigset_t all, before;
    sigfillset(&all);
    pthread_attr_t attributes;
    if (pthread_attr_init(&attributes)) return false;
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    helper->exists = !pthread_attr_setaffinity_np(&attributes, sizeof cores, &cores) &&
                     !pthread_create(&helper->thread, &attributes, help, helper);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return helper->exists;
}

/* Once, with `changing` held. */
static bool prepare(void) {
    static bool prepared;
    if (!prepared) prepared = !pthread_atfork(before_fork, after_fork, in_child);
    return prepared;
}

/* From now on `helpers` threads help, each on one of `cores`, borrowed under `name` (not 0) from the one of `lenders`
 * (addresses; 0: not borrowed) while that is idle. A lender must stay where it is as long as the process lives.
 * `got`: how many may help, fewer if the system allows no more; a core that it does not allow costs its own helper only. */
EXPORT void pd_set_threads(int64_t helpers, const int64_t *cores, const int64_t *lenders, int64_t name, int64_t *got) {
    pthread_mutex_lock(&state.changing);
    const bool prepared = prepare();
    if (helpers > MOST_HELPERS) helpers = MOST_HELPERS;
    int started = 0;
    atomic_store(&state.name, (unsigned)name);
    for (int64_t i = 0; i < helpers && prepared; i++) {
        atomic_store(&state.team[started].lender, (Lender *)(intptr_t)lenders[i]);
        if (start(state.team + started, (int)cores[i])) started++;
    }
    atomic_store(&state.helpers, started);
    *got = started;
    pthread_mutex_unlock(&state.changing);
}

/* From now on callers of kernels give way to wishes for the core whose state is `lender` (an address that stays; 0:
 * they do not), of which they are owner number `seat`. Whoever calls this marks that owner as one who does. */
EXPORT void pd_give_way_at(int64_t lender, int64_t seat) {
    pthread_mutex_lock(&state.changing);
    atomic_store(&state.own_seat, (unsigned)seat);
    atomic_store_explicit(&state.own, prepare() ? (Lender *)(intptr_t)lender : NULL, memory_order_release);
    pthread_mutex_unlock(&state.changing);
}

/* For how long callers have stood aside since the process began. */
EXPORT void pd_aside_ns(int64_t *aside_ns) { *aside_ns = atomic_load(&state.aside_ns); }

/* Wish for a core (`lender`: the address of its state) under `name`, for `most_ns` at most.
 * `got`: 0 if somebody else wishes for it. */
EXPORT void pd_ask(int64_t lender, int64_t name, int64_t most_ns, int64_t *got) {
    Lender *asked = (Lender *)(intptr_t)lender;
    const int64_t now = now_ns(), until = now + (most_ns < LONGEST_WISH_NS ? most_ns : LONGEST_WISH_NS);
    const uint64_t ours = (uint64_t)(until / 1000) << WISH_NAME_BITS | (uint64_t)name;
    uint64_t wish = atomic_load(&asked->wish);
    *got = !time_left(wish, now) && atomic_compare_exchange_strong(&asked->wish, &wish, ours);
}

/* The wish has ended. It may have ended before, and be somebody else's now. */
EXPORT void pd_ask_no_more(int64_t lender, int64_t name) {
    Lender *asked = (Lender *)(intptr_t)lender;
    uint64_t wish = atomic_load(&asked->wish);
    if ((int64_t)(wish & ((1 << WISH_NAME_BITS) - 1)) != name) return;
    if (!atomic_compare_exchange_strong(&asked->wish, &wish, 0)) return;
    atomic_fetch_add(&asked->wishes_ended, 1);
    wake_all_shared(&asked->wishes_ended);
}

/* For how long each helper has worked since the process began. worked_ns [MOST_HELPERS] */
EXPORT void pd_helped_ns(int64_t *worked_ns) {
    for (int i = 0; i < MOST_HELPERS; i++) worked_ns[i] = atomic_load(&state.team[i].worked_ns);
}

#else /* no helpers: futexes and affinity are Linux's */

void pd_parallel(Work work, void *context, int64_t count) {
    for (int64_t item = 0; item < count; item++) work(context, item);
}
EXPORT void pd_set_threads(int64_t helpers, const int64_t *cores, const int64_t *lenders, int64_t name, int64_t *got) {
    *got = 0;
}
EXPORT void pd_helped_ns(int64_t *worked_ns) { memset(worked_ns, 0, MOST_HELPERS * sizeof *worked_ns); }
EXPORT void pd_give_way_at(int64_t lender, int64_t seat) {}
EXPORT void pd_aside_ns(int64_t *aside_ns) { *aside_ns = 0; }
EXPORT void pd_ask(int64_t lender, int64_t name, int64_t most_ns, int64_t *got) { *got = 0; }
EXPORT void pd_ask_no_more(int64_t lender, int64_t name) {}
void pd_give_way(void) {}
int pd_may_be_helped(void) { return 0; }

#endif
