"""One new class for each kind and class of modules, which goes when its modules go."""

from __future__ import annotations

import copy
import gc
import weakref

from torch import nn

from weft.models.inspect.blocks import replace_class, revert


class Loud(nn.Module):
    """Twice what the class before computes."""

    def forward(self, x: float) -> float:
        return 2 * super().forward(x)


class Plain(nn.Module):
    def forward(self, x: float) -> float:
        return x + 1


def test_modules_of_one_class_share_the_new_class():
    modules, other = [Plain() for _ in range(12)], nn.Identity()
    for module in (*modules, other):
        replace_class(module, Loud, level=3)
    assert {type(module) for module in modules} == {type(modules[0])}
    assert type(other) is not type(modules[0])
    assert modules[0](1) == 4
    assert other(1) == 2
    assert modules[5]._weft_level == 3
    assert type(copy.deepcopy(modules[0])) is type(modules[0])
    assert (type(modules[0]).__name__, type(modules[0]).__module__) == ("Plain", __name__)


def test_members_are_made_once_for_a_class():
    made = []

    def members(own: type) -> dict[str, object]:
        made.append(own)
        return {"forward": lambda self, x: own.forward(self, x) * 10}

    class Kind:
        pass

    modules = [Plain(), Plain()]
    for module in modules:
        replace_class(module, Kind, members)
    assert made == [Plain]
    assert [module(1) for module in modules] == [20, 20]


def test_a_module_gets_its_class_back():
    module = Plain()
    revert(module, Loud)
    replace_class(module, Loud)
    revert(module, nn.Linear)
    assert type(module) is not Plain
    revert(module, Loud)
    assert type(module) is Plain


def test_a_class_goes_with_its_modules():
    class Here(Plain):
        pass

    module = Here()
    replace_class(module, Loud)
    known = weakref.ref(type(module))
    del module, Here
    gc.collect()
    assert known() is None
