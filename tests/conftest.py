"""Settings of every test run: no network, one compute thread a process, no time limits on generated examples."""

from __future__ import annotations

import os

import hypothesis

# Before anything imports torch or huggingface_hub; child processes inherit both.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

hypothesis.settings.register_profile("pdserve", deadline=None)
hypothesis.settings.load_profile("pdserve")
