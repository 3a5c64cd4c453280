import pytest
from torch import nn

from smyrf.models.changed import changed, is_changed


class Owner:
    shared = "class"


def test_an_attribute_of_the_class_is_uncovered_again():
    owner = Owner()
    with changed(owner, "shared", "own"):
        assert (owner.shared, is_changed(owner, "shared"), is_changed(Owner(), "shared")) == ("own", True, False)
    assert owner.shared == "class"
    assert "shared" not in vars(owner)
    assert not is_changed(owner, "shared")


def test_nested_blocks_uncover_the_one_around_them():
    module = nn.Linear(1, 1)
    with changed(module, "training", False):
        with changed(module, "training", 3):
            assert module.training == 3
        assert module.training is False
    assert module.training is True


def test_of_blocks_that_overlap_the_last_one_puts_back():
    module = nn.Linear(1, 1)
    first, second = changed(module, "training", 1), changed(module, "training", 2)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert module.training == 2
    second.__exit__(None, None, None)
    assert module.training is True


def test_equal_values_of_two_blocks_are_two():
    module = nn.Linear(1, 1)
    with changed(module, "training", False):
        with changed(module, "training", False):
            pass
        assert module.training is False and is_changed(module, "training")


def test_an_error_is_not_swallowed_and_whatever_was_set_inside_is_undone():
    module = nn.Linear(1, 1)

    def fail():
        module.training = 7
        raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"), changed(module, "training", False):
        fail()
    assert module.training is True
