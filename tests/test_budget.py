"""How many slots, and whether overflow rows: named budgets are kept, defaults give way."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from expert_cache_shim import budget, vllm_compat
from expert_cache_shim.settings import Settings, SettingsError

GPU = torch.device("cuda")
LAYERS, E, SLOT = 6, 32, 1000  # bytes of one slot of one layer


def candidates(layers: int = LAYERS, experts: int = E, slot: int = SLOT) -> list:
    layer = SimpleNamespace(hidden_size=64, intermediate_size_per_partition=32, top_k=4)
    return [
        SimpleNamespace(name=f"{experts}.{n}", experts=experts, slot_bytes=slot, layer=layer)
        for n in range(layers)
    ]


def cost(plan: budget.Plan, of: list) -> int:
    """Device bytes of a plan: slots of every layer, overflow rows once for each shape."""
    private = sum(plan.slots[c.name] * c.slot_bytes for c in of)
    shapes = {
        (c.experts, c.slot_bytes): (c.experts - plan.slots[c.name]) * c.slot_bytes for c in of
    }
    return private + (plan.overflow + plan.preload) * sum(shapes.values())


@pytest.fixture
def planned(monkeypatch):
    """Plans with a certain number of bytes to spend; None where it is not known."""

    def plan(room: int | None, of: list | None = None, **settings) -> budget.Plan:
        monkeypatch.setattr(budget, "room_on", lambda device, asked: room)
        return budget.plan(of or candidates(), Settings(**settings), GPU)

    return plan


def slots_of(plan: budget.Plan) -> int:
    (slots,) = set(plan.slots.values())
    return slots


def test_with_room_for_all_the_default_is_half_and_overflow(planned):
    plan = planned(10**9)
    assert (slots_of(plan), plan.overflow, plan.note) == (E // 2, True, "")


def test_where_the_room_is_not_known_the_default_is_taken(planned):
    assert planned(None) == planned(10**9, preload="off")


def test_a_default_that_gives_way_keeps_overflow_and_uses_the_room_to_less_than_one_slot(planned):
    one_more = (LAYERS - 1) * SLOT  # a slot for each layer, and one overflow row less
    for room in range(LAYERS * SLOT + (E - 1) * SLOT, 200_000, 700):
        plan = planned(room)
        spent = cost(plan, candidates())
        assert plan.overflow, room
        assert spent <= room
        assert slots_of(plan) == E // 2 or room - spent < one_more, room


def test_a_default_that_gives_way_says_so(planned):
    plan = planned(80_000)
    assert slots_of(plan) < E // 2
    assert f"{slots_of(plan)} slots a layer" in plan.note


def test_too_little_room_for_overflow_and_one_slot_goes_to_slots(planned):
    plan = planned(LAYERS * SLOT + (E - 1) * SLOT - 1)
    assert not plan.overflow
    assert slots_of(plan) >= 1
    assert cost(plan, candidates()) <= LAYERS * SLOT + (E - 1) * SLOT - 1
    assert "EXPERT_CACHE_OVERFLOW=on" in plan.note


@pytest.mark.parametrize("room", [-5, 0, SLOT])
def test_no_room_at_all_is_one_slot_without_overflow(planned, room):
    plan = planned(room)
    assert (slots_of(plan), plan.overflow) == (1, False)


@pytest.mark.parametrize(
    "settings", [{"slots": 20}, {"fraction": 0.75}, {"gib": 20 * LAYERS * SLOT / 2**30 + 1e-9}]
)
def test_a_named_budget_is_taken_whatever_the_room(planned, settings):
    expected = 24 if "fraction" in settings else 20
    plan = planned(0, **settings)
    assert (slots_of(plan), plan.overflow) == (expected, False)
    assert "no room for overflow rows" in plan.note
    plan = planned(10**9, **settings)
    assert (slots_of(plan), plan.overflow, plan.note) == (expected, True, "")


@pytest.mark.parametrize("spare, warned", [(0, False), (-1, True)])
@pytest.mark.parametrize(
        "settings",
    [
        {"overflow": "off"}, {"overflow": "on", "preload": "off"},
        {"overflow": "on", "preload": "on"},
    ],
)  # fmt: skip
def test_what_is_named_and_does_not_fit_is_warned_of(planned, caplog, settings, spare, warned):
    room = cost(planned(10**9, slots=20, **settings), candidates()) + spare
    caplog.clear()
    planned(room, slots=20, **settings)
    assert [message[:27] for message in caplog.messages] == ["expert cache: takes about 0"] * warned


@pytest.mark.parametrize("room", [None, 0, 10**9])
def test_named_overflow_is_taken_whatever_the_room(planned, room):
    assert planned(room, slots=5, overflow="on").overflow
    assert not planned(room, slots=5, overflow="off").overflow
    assert planned(room, overflow="on").overflow
    assert not planned(room, overflow="off").overflow


def test_overflow_is_set_aside_once_for_each_shape(planned):
    mixed = candidates(3, 32, 1000) + candidates(3, 16, 3000)
    plan = planned(10**9, mixed)
    needed = cost(plan, mixed)
    assert needed == 3 * 16 * 1000 + 3 * 8 * 3000 + 2 * (16 * 1000 + 8 * 3000)
    assert planned(needed, mixed) == plan
    assert planned(needed - 1, mixed) == replace(plan, preload=False)
    once = needed - (16 * 1000 + 8 * 3000)
    assert planned(once, mixed) == replace(plan, preload=False)
    assert planned(once - 1, mixed).slots != plan.slots


def test_preload_is_the_first_to_give_way_unless_it_is_named(planned):
    room = cost(planned(10**9, preload="off"), candidates())
    assert planned(room) == planned(10**9, preload="off")
    named = planned(room, preload="on")
    assert named.preload and slots_of(named) < E // 2
    assert cost(named, candidates()) <= room
    assert not planned(10**9, preload="on", overflow="off").preload
    assert not planned(10**9, candidates(layers=1)).preload
    assert planned(None, preload="on").preload


@pytest.mark.parametrize("room, preload", [(0, False), (10**9, True)])
def test_a_budget_and_overflow_that_are_named_leave_preload_to_the_room(planned, room, preload):
    assert planned(room, slots=5, overflow="on").preload == preload


def test_a_budget_that_pays_for_no_slot_is_an_error(planned):
    with pytest.raises(SettingsError, match="EXPERT_CACHE_GIB"):
        planned(10**9, gib=(LAYERS * SLOT - 1) / 2**30)


# --- The room -------------------------------------------------------------------------------


@pytest.fixture
def device(monkeypatch):
    """A GPU of 100 GB of which vLLM may use a share, with some of it used."""

    def made(share=0.9, free=60 * 10**9, reserved=20 * 10**9, at_work=5 * 10**9):
        monkeypatch.setattr(vllm_compat, "device_share", lambda: share)
        monkeypatch.setattr(vllm_compat, "memory_at_work", lambda hidden, inner, top_k: at_work)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 100 * 10**9))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
        return budget.room_on(GPU, candidates())

    return made


def test_the_room_is_vllms_share_less_what_is_used_and_what_serving_needs(device):
    assert device(free=80 * 10**9) == (90 - 20 - 5) * 10**9 - budget.CONTEXT


def test_the_room_is_never_more_than_what_is_free(device):
    assert device(free=30 * 10**9) == (30 - 5) * 10**9


def test_a_share_that_is_not_known_makes_the_room_unknown(device):
    assert device(share=None) is None


def test_a_driver_that_cannot_be_asked_makes_the_room_unknown(device, monkeypatch):
    device()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: 1 // 0)
    assert budget.room_on(GPU, candidates()) is None


def test_a_cpu_has_no_room_to_know():
    assert budget.room_on(torch.device("cpu"), candidates()) is None
