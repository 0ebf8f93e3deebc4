"""Which steps of vLLM are CUDA graphs, and what is attested of its attention. vLLM itself is not needed."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from rllib_llm.engines.vllm import compat

OURS, LEARNERS = {"vllm.FLASH_ATTN.fa3"}, "flash_attention_3.attention@vllm#1"


@pytest.mark.parametrize(("sequences", "tokens"), [(1, 1024), (32, 100), (256, 512), (256, 2048), (600, 64)])
def test_graphs_hold_every_decode_and_steps_up_to_the_size_asked_for(sequences: int, tokens: int) -> None:
    """Ascending sizes from 1 up to the larger of both; a step is padded by an eighth or by 8 tokens at most."""
    options = compat.graph_options(sequences, tokens, 128)
    sizes = options["cudagraph_capture_sizes"]
    assert (options["cudagraph_mode"], options["mode"], sizes[0]) == ("FULL", 0, 1)
    asked = max(sequences, tokens)
    assert asked - max(8, asked / 8) < sizes[-1] <= asked
    assert all(0 < b - a <= max(8, a / 8) for a, b in itertools.pairwise(sizes))


@pytest.mark.parametrize(("tokens", "width"), [(0, 128), (1024, 256)])
def test_only_decoding_is_captured_where_a_graph_of_prompts_would_be_wrong(tokens: int, width: int) -> None:
    """Not asked for, or heads so wide that FlashAttention takes one query per sequence for another case."""
    assert compat.graph_options(64, tokens, width) == {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}


@pytest.mark.parametrize("tokens", [-1, 2049])
def test_sizes_that_are_not_captured_are_refused(tokens: int) -> None:
    """With the key, the value and what it may be."""
    with pytest.raises(ValueError, match=rf"graph_tokens={tokens}: .* up to 2048 tokens"):
        compat.graph_options(64, tokens, 128)


def engine(mode: str, **of_builder: Any) -> Any:
    """What compat reads of a `vllm.LLM`, with one group of attention layers."""
    builder = SimpleNamespace(device="cpu", **of_builder)
    group = SimpleNamespace(get_metadata_builder=lambda: builder)
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=mode),
        scheduler_config=SimpleNamespace(max_num_seqs=6, max_num_batched_tokens=512),
    )
    runner = SimpleNamespace(attn_groups=[[group]], vllm_config=config)
    worker = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
    executor = SimpleNamespace(driver_worker=worker)
    return SimpleNamespace(llm_engine=SimpleNamespace(model_executor=executor)), builder


@pytest.mark.parametrize(("mode", "graphs"), [("NONE", False), ("FULL", True)])
def test_attention_is_the_learners_only_if_no_step_may_cut_a_sequences_keys(mode: str, graphs: bool) -> None:
    """As vLLM builds it, one part is certain inside graphs at most; made to sum in order, it is in every step. That is
    read back from the very fields that vLLM reads."""
    llm, builder = engine(
        mode, use_full_cuda_graph=graphs, max_num_splits=int(graphs), max_cudagraph_size=64, aot_schedule=True
    )
    before = compat.graph_state(llm)
    assert before == compat.GraphState(mode, (0,))
    assert compat.attention_operator(OURS, LEARNERS, before) == "vllm.FLASH_ATTN.fa3 + splits=(0,)"
    compat.sum_keys_in_order(llm)
    after = compat.graph_state(llm)
    assert after == compat.GraphState(mode, (1,))
    assert compat.attention_operator(OURS, LEARNERS, after) == LEARNERS
    if (
        not graphs
    ):  # vLLM has this buffer for graphs only: 4 entries for every sequence up to a multiple of 4, and one
        assert builder.scheduler_metadata.shape == (33,)
    builder.max_num_splits = 2
    assert compat.graph_state(llm).splits == (2,)


def test_another_attention_is_left_alone_and_named() -> None:
    """Without a number of splits there is nothing to set, and the operator is not the learner's."""
    llm, builder = engine("FULL")
    before = dict(vars(builder))
    compat.sum_keys_in_order(llm)
    assert vars(builder) == before
    state = compat.graph_state(llm)
    assert (
        compat.attention_operator({"vllm.TRITON_ATTN.Impl"}, LEARNERS, state)
        == "vllm.TRITON_ATTN.Impl + splits=()"
    )
