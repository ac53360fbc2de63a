"""What a run of bench.schemes is judged to be."""

import copy

import pytest

from bench import layer_check, schemes

TOKENS = [[[1, 2, 3, 4]], [[5, 6], [7, 8]]]
WRONG = [[[1, 2, 3, 9]], [[5, 6], [7, 8]]]
COUNTERS = {"hits": 5, "misses": 3}
KERNEL = {"method": "Fp8MoEMethod", "kernel": "TritonExperts"}
BITWISE = [{"layer": "0", "tokens": 4, "difference": 0.0, "repeated": 0.0}]
CACHED = {
    **KERNEL, "arm": "cache-16", "armed": 2, "tokens": TOKENS, "counters": COUNTERS,
    "wrong": WRONG, "layers": BITWISE, "tensors": [{}] * 4, "warnings": [],
}  # fmt: skip
UNCACHED = {**KERNEL, "arm": "uncached", "armed": 0, "tokens": TOKENS, "warnings": []}


@pytest.fixture
def scheme() -> dict:
    quarter = {**CACHED, "arm": "cache-8"}
    return copy.deepcopy({"name": "fp8_block", "arms": [UNCACHED, CACHED, quarter]})


def test_equal_tokens_a_used_cache_and_a_control_that_differs_are_good(scheme):
    assert schemes.judge(scheme) == ("served, identical", True)
    assert schemes.row(scheme) == [
        "fp8_block", "Fp8MoEMethod", "TritonExperts", "4", "8 of 8",
        "5 / 3 (cache-16), 5 / 3 (cache-8)", "bitwise", "7 of 8", "served, identical",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "change, result",
    [
        ({"tokens": WRONG}, "tokens differ (cache-8)"),
        ({"counters": {"hits": 0, "misses": 8}}, "the cache did not work (cache-8)"),
        ({"wrong": TOKENS}, "wrong experts do not show (cache-8)"),
    ],
)
def test_one_arm_that_is_wrong_makes_the_scheme_wrong(scheme, change, result):
    scheme["arms"][2].update(change)
    assert schemes.judge(scheme) == (result, False)


def test_a_refusal_is_a_result_as_long_as_the_tokens_are_right(scheme):
    refused = {**UNCACHED, "arm": "cache-16", "warnings": ["not armed: it is monolithic"]}
    scheme["arms"][1:] = [refused]
    assert schemes.judge(scheme) == ("refused: not armed: it is monolithic", True)
    assert schemes.row(scheme)[3:5] == ["-", "-"]
    refused["tokens"] = WRONG
    assert schemes.judge(scheme) == ("tokens differ (cache-16)", False)


def test_one_storage_may_be_refused_where_the_other_is_served(scheme):
    plain = {**UNCACHED, "arm": "cache-8-plain", "warnings": ["not known to run"]}
    scheme["arms"].append(plain)
    assert schemes.judge(scheme) == (
        "served, identical; refused (cache-8-plain): not known to run", True,
    )  # fmt: skip
    plain["tokens"] = WRONG
    assert schemes.judge(scheme) == ("tokens differ (cache-8-plain)", False)


def test_a_scheme_without_a_kernel_here_is_no_fault_of_the_cache(scheme):
    scheme["arms"][:] = [{"arm": "uncached", "error": "NotImplementedError: no kernel"}]
    result, good = schemes.judge(scheme)
    assert good and result == "vLLM does not serve it here: NotImplementedError: no kernel"


def test_an_error_with_the_cache_is(scheme):
    scheme["arms"][1:] = [{"arm": "cache-16", "error": "RuntimeError: x"}]
    assert schemes.judge(scheme) == ("failed: RuntimeError: x", False)
    scheme["arms"][1:] = []
    scheme["error"] = "the process ended with status -11"
    for arms in ([UNCACHED], [UNCACHED, CACHED]):
        scheme["arms"] = arms
        assert schemes.judge(scheme) == ("failed: the process ended with status -11", False)


def test_what_time_did_not_allow_is_not_tried():
    scheme = {"name": "awq", "arms": []}
    assert schemes.judge(scheme) == ("not tried", True)
    assert schemes.row(scheme)[0] == "awq"
    assert schemes.judge({"name": "awq", "arms": [UNCACHED]}) == (
        "not tried through the cache", True,
    )  # fmt: skip


def test_events_of_a_process_that_dies_leave_the_other_schemes(capsys):
    run = {"schemes": []}
    left = [schemes.parse(name) for name in ("gptq", "awq")]
    schemes.take(run, left, {"event": "begin", "scheme": "gptq"})
    schemes.take(run, left, {"event": "error", "text": "died", "log": ["the last line"]})
    assert [scheme.name for scheme in left] == ["awq"]
    assert schemes.judge(run["schemes"][0])[0] == "vLLM does not serve it here: died"
    assert "the last line" in capsys.readouterr().out


def test_a_table_is_markdown_with_a_row_for_each_scheme(scheme):
    scheme["arms"][1]["warnings"] = []
    lines = schemes.table({"schemes": [scheme, {"name": "a|b", "arms": []}]}).splitlines()
    assert len(lines) == 4
    assert {line.replace("\\|", "").count("|") for line in lines} == {len(schemes.HEADERS) + 1}


def test_a_backend_comes_after_the_checkpoint():
    scheme = schemes.parse("fp8_block@marlin")
    assert (scheme.checkpoint, scheme.engine) == ("fp8_block", {"moe_backend": "marlin"})
    with pytest.raises(ValueError, match="scheme 'fp9': allowed are bf16"):
        schemes.parse("fp9")


def test_the_default_schemes_are_written_by_somebody():
    assert [schemes.parse(name).name for name in schemes.DEFAULT] == list(schemes.DEFAULT)


def test_a_layer_that_differs_says_where_and_whether_the_kernel_alone_does():
    worse = {"layer": "1", "tokens": 16, "difference": 0.25, "repeated": 0.0}
    assert layer_check.describe(BITWISE) == "bitwise"
    assert layer_check.describe([]) == "-"
    assert layer_check.describe([*BITWISE, worse]) == "up to 0.25 at 16 tokens (repeated: 0)"
