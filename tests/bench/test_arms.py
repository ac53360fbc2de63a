"""What the names of arms mean, and what the command line may say."""

import argparse

import pytest

from bench import arms, options


def test_resident_and_uncached_have_no_cache():
    assert not arms.parse("resident").engine
    assert arms.parse("uncached").engine["cpu_offload_params"] == ["experts"]
    for name in ("resident", "uncached"):
        assert arms.parse(name).environment == {"EXPERT_CACHE_DISABLE": "1"}
        assert not arms.parse(name).cached


def test_a_cached_arm_offloads_as_the_uncached_one_does():
    arm = arms.parse("cache-64-lru-plain")
    assert arm.cached
    assert arm.engine == arms.parse("uncached").engine
    assert arm.environment == {
        "EXPERT_CACHE_SLOTS": "64",
        "EXPERT_CACHE_POLICY": "lru",
        "EXPERT_CACHE_STORAGE": "plain",
    }


def test_slots_may_be_left_to_the_cache_and_preload_be_off():
    arm = arms.parse("cache-auto-nopreload")
    assert arm.cached
    assert arm.environment == {"EXPERT_CACHE_PRELOAD": "off"}


@pytest.mark.parametrize("name", ["", "cached-64", "cache", "cache-", "cache-x", "cache-64-mru"])
def test_another_name_is_an_error_that_names_it(name):
    with pytest.raises(ValueError, match=f"arm '{name}'"):
        arms.parse(name)


def test_an_arm_decides_its_own_settings(tmp_path, monkeypatch):
    monkeypatch.setenv("EXPERT_CACHE_SLOTS", "3")
    monkeypatch.setenv("EXPERT_CACHE_DISABLE", "1")
    monkeypatch.setenv("EXPERT_CACHE_CHUNKS", "32")
    found = arms.environment(arms.parse("cache-64"), tmp_path, {"A": "b"})
    assert found["EXPERT_CACHE_SLOTS"] == "64"
    assert "EXPERT_CACHE_DISABLE" not in found
    assert (found["EXPERT_CACHE_CHUNKS"], found["A"]) == ("32", "b")
    assert "EXPERT_CACHE_SLOTS" not in arms.environment(arms.parse("resident"), tmp_path, {})


def test_options_of_the_engine_come_from_the_variable_and_the_command_line(monkeypatch):
    monkeypatch.setenv("BENCH_ENGINE", "attention_backend=TRITON_ATTN max_num_seqs=8")
    parser = argparse.ArgumentParser()
    options.add(parser)
    read = options.read(
        parser.parse_args(["--engine", "max_num_seqs=16", "--engine", 'x={"a": [1]}']), [4, 1]
    )
    assert read.engine["attention_backend"] == "TRITON_ATTN"
    assert read.engine["max_num_seqs"] == 16
    assert read.engine["x"] == {"a": [1]}
    assert read.engine["compilation_config"] == {"cudagraph_capture_sizes": [1, 4]}
    assert read.engine["seed"] == 0


def test_an_option_without_a_value_is_an_error_that_names_it():
    with pytest.raises(SystemExit, match="'max_num_seqs' is not NAME=VALUE"):
        options.engine_options(["max_num_seqs"])
