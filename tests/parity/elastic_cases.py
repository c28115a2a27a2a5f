"""The case that the replicas of test_elastic_local_sgd.py train, one process per replica."""

from __future__ import annotations

import dataclasses

from tests.parity.cases import LLAMA
from weft.verify.parity import DecoderCase

STEPS, EVERY, TIMEOUT_S, PAUSE_S = 8, 2, 1.5, 0.5
KEY = "the key of these replicas"
CASE = dataclasses.replace(DecoderCase(LLAMA, num_steps=STEPS, max_grad_norm=0.5), num_steps=STEPS)
