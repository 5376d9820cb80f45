"""The gateway. Life of a request here, by the file that it meets:

0. `front.py` lists what it passes first: the request log, CORS, API keys, the limits of its client.
1. `asgi.py` reads the body and gives the request an id; `app.py` knows which path is answered by what.
2. `models.py` finds the model it is for (`aliases.py`: by weight, if it names an alias). `api/parsing.py` validates
   it, templates and tokenises it once, in a thread (`api/text.py` holds the tokenizer). From here on it is a
   `ParsedRequest`: token ids and parameters.
3. `generate.py` makes one `Request` of every prompt, and watches the connection beside them.
4. `limits.py`: the request waits in its model's queue, holding nothing. `dispatch.py` takes it out when `router.py`
   finds a pair of workers with room for it among those that `pool.py` knows to be alive (`membership.py` let them in),
   and `elastic.py` says which of the two computes its prompt.
5. `request.py` asks decode for a reservation, sends the prompt to prefill, and accepts tokens, each once and in order.
   A worker that fails or dies costs an attempt; the next one starts from the tokens accepted so far.
6. `reply.py` turns tokens into text, finds stop strings, and fills the response that `api/responses.py` words; a
   client that does not read is cut off, one that went away is cancelled at both workers.
7. `metrics.py` counts how it ended. Until then the status code is open: headers go out with the first token,
   or with a comment when a worker takes long to give it.

Beside it: `__main__.py`, `config.py` and `server.py` (the process), `up.py`, `launch.py` and `supervisor.py` (a whole
system on one machine), `cli.py` (the `pdserve` command).
"""
