"""EXPERT_CACHE_* variables: defaults, allowed values, the text of errors, the slot budget."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from expert_cache_shim.settings import POLICIES, VARIABLES, Settings, SettingsError

ROOT = Path(__file__).resolve().parents[1]


def read(**values):
    return Settings.from_environment({f"EXPERT_CACHE_{k}": v for k, v in values.items()})


def test_an_empty_environment_gives_the_documented_defaults():
    assert Settings.from_environment({}) == Settings(
        disable=False,
        slots=None,
        gib=None,
        fraction=None,
        policy="lrfu",
        half_life=24.0,
        decay=64,
        lib=None,
        chunks=16,
        lanes=1,
        storage="auto",
        overflow="auto",
        allow_cpu=False,
        snapshot=None,
        unknown=(),
    )


def test_settings_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().slots = 3


def test_the_table_describes_every_field_once_and_each_default_reads_back():
    fields = [field.name for field in dataclasses.fields(Settings) if field.name != "unknown"]
    assert [variable.field for variable in VARIABLES] == fields
    for variable in VARIABLES:
        assert variable.allowed and variable.meaning
        read_back = Settings.from_environment({variable.name: variable.default})
        assert read_back == Settings(), variable.name


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("DISABLE", "0", False),
        ("DISABLE", "1", True),
        ("SLOTS", "1", 1),
        ("SLOTS", "+64", 64),
        ("SLOTS", " 64\n", 64),
        ("GIB", "12", 12.0),
        ("GIB", "1.5e1", 15.0),
        ("FRACTION", "1", 1.0),
        ("FRACTION", ".25", 0.25),
        ("POLICY", "slru", "slru"),
        ("POLICY", "LRU", "lru"),
        ("HALF_LIFE", "1", 1.0),
        ("HALF_LIFE", "10000", 10000.0),
        ("DECAY", "2147483647", 2147483647),
        ("LIB", "/opt/a folder/lib.so", "/opt/a folder/lib.so"),
        ("CHUNKS", "4096", 4096),
        ("LANES", "64", 64),
        ("STORAGE", "plain", "plain"),
        ("OVERFLOW", "off", "off"),
        ("ALLOW_CPU", "1", True),
        ("SNAPSHOT", "OFF", "off"),
        ("SNAPSHOT", "/var/Run", "/var/Run"),
    ],
)
def test_an_allowed_value_is_read(name, text, value):
    settings = read(**{name: text})
    assert getattr(settings, name.lower()) == value
    assert dataclasses.replace(settings, **{name.lower(): value}) == settings


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda variable: variable.name)
@pytest.mark.parametrize("blank", ["", " ", "\t\n"])
def test_a_blank_value_counts_as_unset(variable, blank):
    assert Settings.from_environment({variable.name: blank}) == Settings()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("DISABLE", "2"),
        ("DISABLE", "yes"),
        ("SLOTS", "abc"),
        ("SLOTS", "-1"),
        ("SLOTS", "0"),
        ("SLOTS", "1e9"),
        ("SLOTS", "1.0"),
        ("SLOTS", "1_000"),
        ("SLOTS", "0x10"),
        ("SLOTS", "++1"),
        ("SLOTS", "6 4"),
        ("SLOTS", "\u0661"),  # a digit to int(), in another script
        ("SLOTS", "9" * 5000),  # more digits than int() converts
        ("GIB", "0"),
        ("GIB", "-1"),
        ("GIB", "nan"),
        ("GIB", "inf"),
        ("GIB", "1e999"),
        ("GIB", "1_0.5"),
        ("GIB", "12GiB"),
        ("FRACTION", "0"),
        ("FRACTION", "1.0001"),
        ("FRACTION", "50%"),
        ("FRACTION", "nan"),
        ("FRACTION", "\u0660.\u0665"),
        ("POLICY", "foo"),
        ("POLICY", "lru,lfu"),
        ("HALF_LIFE", "0.5"),
        ("HALF_LIFE", "10001"),
        ("HALF_LIFE", "infinity"),
        ("DECAY", "0"),
        ("DECAY", "2147483648"),
        ("CHUNKS", "0"),
        ("CHUNKS", "4097"),
        ("LANES", "0"),
        ("LANES", "4097"),
        ("STORAGE", "virtul"),
        ("OVERFLOW", "1"),
        ("ALLOW_CPU", "true"),
    ],
)
def test_an_error_is_one_line_with_variable_value_and_what_is_allowed(name, text):
    with pytest.raises(SettingsError) as caught:
        read(**{name: text})
    line = str(caught.value)
    allowed = next(v.allowed for v in VARIABLES if v.name == f"EXPERT_CACHE_{name}")
    assert line.startswith(f"EXPERT_CACHE_{name}={text[:57]!r}"[:-1])
    assert line.endswith(f": allowed is {allowed}")
    assert len(line.splitlines()) == 1 and len(line) < 250


def test_an_error_stays_one_line_when_the_value_is_many():
    with pytest.raises(SettingsError) as caught:
        read(POLICY="a\nb\u2028c\r")
    assert len(str(caught.value).splitlines()) == 1


def test_chunks_times_lanes_is_bounded_by_the_grid():
    assert read(CHUNKS="4096", LANES="15").lanes == 15
    with pytest.raises(SettingsError, match="CHUNKS=4096 times EXPERT_CACHE_LANES=16 is 65536"):
        read(CHUNKS="4096", LANES="16")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("EXPERT_CACHE_SLOT", "did you mean EXPERT_CACHE_SLOTS?"),
        ("EXPERT_CACHE_POLCIY", "did you mean EXPERT_CACHE_POLICY?"),
        ("EXPERT_CACHE_slots", "did you mean EXPERT_CACHE_SLOTS?"),
        ("EXPERT_CACHE_ZZZ", "README"),
    ],
)
def test_an_unknown_name_is_one_warning_and_not_an_error(name, hint):
    settings = Settings.from_environment({name: "1", "EXPERT_CACHE_SLOTS": "8"})
    (warning,) = settings.unknown
    assert name in warning and hint in warning and len(warning.splitlines()) == 1
    assert settings.slots == 8


def test_names_of_others_are_left_alone():
    environ = {"EXPERT_CACHE": "1", "MY_EXPERT_CACHE_SLOTS": "1", "PATH": "/bin"}
    assert Settings.from_environment(environ) == Settings()


@pytest.mark.parametrize(
    ("values", "experts", "slots"),
    [
        ({}, 128, 64),
        ({}, 3, 1),
        ({"FRACTION": "0.001"}, 128, 1),
        ({"FRACTION": "1"}, 128, 128),
        ({"FRACTION": "0.29"}, 100, 29),  # 0.29 * 100 is 28.999999999999996
        ({"FRACTION": "0.299"}, 100, 29),
        ({"SLOTS": "64"}, 128, 64),
        ({"SLOTS": "500"}, 128, 500),
        ({"GIB": "1"}, 128, 1024),
        ({"GIB": "0.0625"}, 128, 64),
        ({"GIB": "0.0634"}, 128, 64),
    ],
)
def test_the_slot_budget_of_a_layer(values, experts, slots):
    assert read(**values).slots_for(experts, bytes_per_slot=2**20) == slots


def test_unset_is_a_half_and_names_no_budget():
    assert Settings().slots_for(128, 1) == 64
    assert not Settings().names_a_budget
    for values in (dict(slots=3), dict(gib=1.0), dict(fraction=0.5)):
        assert Settings(**values).names_a_budget


def test_an_exact_fraction_is_never_rounded_below_itself():
    for experts in range(2, 1025):
        for slots in {1, (experts + 1) // 3, experts - 1}:
            assert Settings(fraction=slots / experts).slots_for(experts, 1) == slots


def test_slots_win_over_gib_and_gib_over_fraction():
    assert read(SLOTS="5", GIB="1", FRACTION="0.25").slots_for(128, 2**24) == 5
    assert read(GIB="1", FRACTION="0.25").slots_for(128, 2**24) == 64


def test_a_budget_that_pays_for_no_slot_is_an_error_that_names_the_least():
    with pytest.raises(SettingsError, match=r"EXPERT_CACHE_GIB=0\.1 pays for no slot: .* 0\.5 or"):
        read(GIB="0.1").slots_for(128, bytes_per_slot=2**29)


def test_policies_are_those_of_the_kernel_interface_in_its_order():
    header = (ROOT / "hip" / "expert_cache.h").read_text()
    (body,) = re.findall(r"enum ExpertCachePolicy \{(.*?)\}", header, re.S)
    assert tuple(name.lower() for name in re.findall(r"EXPERT_CACHE_(\w+) =", body)) == POLICIES


def test_the_process_environment_is_the_default_source():
    code = """
from expert_cache_shim.settings import Settings
print(Settings.from_environment().slots)
"""
    environ = {"EXPERT_CACHE_SLOTS": "7", "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert (run.stdout, run.stderr) == ("7\n", "")
