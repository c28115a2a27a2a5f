"""`replace_class` makes one new class per mixin and module class, which is freed with its modules."""

from __future__ import annotations

import copy
import gc
import weakref

from torch import nn

from weft.models.inspect.blocks import replace_class, revert


class Doubled(nn.Module):
    """Doubles the result of the original class."""

    def forward(self, x: float) -> float:
        return 2 * super().forward(x)


class Plain(nn.Module):
    def forward(self, x: float) -> float:
        return x + 1


def test_modules_of_one_class_share_the_new_class():
    modules, other = [Plain() for _ in range(12)], nn.Identity()
    for module in (*modules, other):
        replace_class(module, Doubled, level=3)
    assert {type(module) for module in modules} == {type(modules[0])}
    assert type(other) is not type(modules[0])
    assert modules[0](1) == 4
    assert other(1) == 2
    assert modules[5]._weft_level == 3
    assert type(copy.deepcopy(modules[0])) is type(modules[0])
    assert (type(modules[0]).__name__, type(modules[0]).__module__) == ("Plain", __name__)


def test_members_are_created_once_per_class():
    created = []

    def members(own: type) -> dict[str, object]:
        created.append(own)
        return {"forward": lambda self, x: own.forward(self, x) * 10}

    class Kind:
        pass

    modules = [Plain(), Plain()]
    for module in modules:
        replace_class(module, Kind, members)
    assert created == [Plain]
    assert [module(1) for module in modules] == [20, 20]


def test_revert_restores_the_class():
    module = Plain()
    revert(module, Doubled)
    replace_class(module, Doubled)
    revert(module, nn.Linear)
    assert type(module) is not Plain
    revert(module, Doubled)
    assert type(module) is Plain


def test_class_is_freed_with_its_modules():
    class Local(Plain):
        pass

    module = Local()
    replace_class(module, Doubled)
    reference = weakref.ref(type(module))
    del module, Local
    gc.collect()
    assert reference() is None
