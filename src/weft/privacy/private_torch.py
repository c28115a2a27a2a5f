"""Private names of torch in privacy/, each with its purpose. Checked against torch 2.13."""

from __future__ import annotations

import torch

#: Context without torch function modes, for a module whose gradients vmap computes.
without_functions = torch._C.DisableTorchFunction
