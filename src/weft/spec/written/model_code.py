"""How a model is named by its code."""

from __future__ import annotations

import re

#: module:name, such as timm.models:resnet50.
MODEL_CODE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
