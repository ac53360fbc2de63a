"""What the reader sees in a file."""

from __future__ import annotations

import pytest

from tools.vllm_contract.reading import Differs, Source

TEXT = '''
import enum

if CONDITION:
    class Guarded: ...

try:
    LIMIT: int = 1
except ImportError:
    LIMIT = None


class Mode(enum.IntEnum):
    NONE = 0
    """The first."""

    @property
    @cached(size=1)
    def shape(self, /, width, *rest, height=0, **more):
        self.first, self.second = width
        self.third: int = 3
        other.fourth = 4
        self.register_buffer("fifth", None)

        def inner(): ...
        return inner(width, height=self.first)
'''


@pytest.fixture
def source() -> Source:
    return Source("vllm/a/__init__.py", TEXT)


def test_a_package_has_the_name_of_its_folder(source):
    assert source.module == "vllm.a"
    assert Source("vllm/a/b.py", "").module == "vllm.a.b"


def test_classes_and_assignments_under_a_condition_are_seen(source):
    assert source.classes.keys() == {"Guarded", "Mode"}
    assert source.assigned("LIMIT").place == "vllm/a/__init__.py:10"


def test_a_class_has_bases_fields_and_methods(source):
    mode = source.cls("Mode")
    assert mode.bases == ["IntEnum"]
    assert mode.fields["NONE"].text == "NONE = 0"
    assert mode.methods.keys() == {"shape"}


def test_a_method_has_parameters_and_decorators(source):
    shape = source.cls("Mode").method("shape")
    assert shape.parameters == ["width", "height"]
    assert shape.decorators == {"property", "cached"}


def test_what_is_set_on_self_is_an_attribute(source):
    found = source.cls("Mode").attributes
    assert found.keys() == {"first", "second", "third", "fifth"}


def test_calls_are_found_by_their_last_name(source):
    (call,) = source.root.calls("inner")
    assert call.keywords == {"height": "self.first"}
    assert len(list(source.root.calls("register_buffer"))) == 1
    assert list(source.root.calls("absent")) == []


@pytest.mark.parametrize(
    "look", [lambda s: s.cls("Absent"), lambda s: s.function("shape"), lambda s: s.assigned("NONE")]
)
def test_what_is_not_there_differs(source, look):
    with pytest.raises(Differs, match=r"vllm/a/__init__\.py (has no|does not)"):
        look(source)


def test_what_a_class_lacks_differs_with_its_place(source):
    with pytest.raises(Differs, match=r"Mode \(vllm/a/__init__\.py:13\) has no absent"):
        source.cls("Mode").method("absent")
