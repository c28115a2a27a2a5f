"""Read a DeepSpeed config: the plan and the settings that it becomes, and one outcome for each of its keys.

What every key is to Weft stands in `keys.toml`; what a value makes of it is in the readers.
"""

from weft.deepspeed.imported import Imported, import_deepspeed, plan_from_deepspeed
from weft.deepspeed.outcome import Outcome

__all__ = ["Imported", "Outcome", "import_deepspeed", "plan_from_deepspeed"]
