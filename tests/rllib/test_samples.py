"""Which samples are trained, and which of their tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rllib_llm import metric_names as names
from rllib_llm.algorithm.sampling import NoSamplesError
from tests.rllib.toy import AskTwice

Make = Callable[..., Any]


def test_multi_turn_episodes_mask_what_the_environment_wrote(build: Make, toy_config: Make) -> None:
    """Observation tokens are in the context, have no log-probability, and are not trained."""
    algo = build(toy_config(env=AskTwice, max_turns=2, max_new_tokens=3))
    episodes = algo.env_runner.sample(prompt_indices=[0, 1])
    observation = algo.env_runner.encoder.tokenizer("+0=", add_special_tokens=False)["input_ids"]
    for episode in episodes:
        assert episode.num_turns == 2
        written = episode.completion_ids[~episode.loss_mask]
        assert len(written) == len(observation)
        assert written[0] == observation[0]
        assert (episode.logprobs[~episode.loss_mask] == 0.0).all()
        assert (episode.logprobs[episode.loss_mask] < 0.0).all()
    algo.env_runner.get_metrics()  # forget what sampling by hand logged
    result = algo.train()
    tokens = result[names.LEARNERS]["default_policy"][names.NUM_TOKENS]
    assert tokens == result[names.ENV_RUNNERS][names.NUM_TOKENS_SAMPLED]
    assert result[names.MISMATCH]["bit_equal_share"] == 1.0


def test_token_ids_are_never_tokenised_again(build: Make, toy_config: Make) -> None:
    """What is trained are the sampled ids, even where decoding and encoding them would give others."""
    algo = build(toy_config(env=AskTwice, max_turns=2))
    runner = algo.env_runner
    sampled: list[list[int]] = []
    generate = runner.engine.generate

    def spy(prompts: Any, params: Any, seeds: Any = None) -> Any:
        answers = generate(prompts, params, seeds=seeds)
        sampled.extend(c.token_ids.tolist() for row in answers for c in row)
        return answers

    runner.engine.generate = spy
    episodes = runner.sample(prompt_indices=[0])
    trained = sorted(t for e in episodes for t in e.completion_ids[e.loss_mask].tolist())
    assert trained == sorted(t for ids in sampled for t in ids)
    encoder, ids = runner.encoder, [t for row in sampled for t in row]
    assert encoder.tokenizer(encoder.decode(ids))["input_ids"] != ids, (
        "the toy tokenizer cannot invert random ids"
    )


def test_reward_errors_cost_their_sample_and_are_counted(build: Make, toy_config: Make) -> None:
    """A reward function that raises loses its episodes only; a problem that cannot be made loses its group."""
    algo = build(toy_config(env_config={"broken_rewards": [1], "broken_problems": [2]}))
    result = algo.train()
    assert result[names.ENV_RUNNERS][names.NUM_REWARD_ERRORS] == 8
    assert result[names.ENV_RUNNERS]["num_episodes"] == 8
    assert result[names.LEARNERS]["default_policy"]["module_train_batch_size_mean"] == 8


def test_nothing_but_errors_stops_the_run(build: Make, toy_config: Make) -> None:
    """Three iterations without a usable sample end training with an error that says so (RLlib would go on for ever)."""
    algo = build(toy_config(env_config={"broken_rewards": list(range(100))}))
    algo.train()
    algo.train()
    with pytest.raises(NoSamplesError, match="3 iterations in a row"):
        algo.train()


def test_dynamic_sampling_fills_the_batch_with_informative_groups(build: Make, toy_config: Make) -> None:
    """DAPO's dynamic sampling replaces groups whose rewards are all equal by new problems."""
    algo = build(toy_config(group_size=2).training(dynamic_sampling=True, max_sample_rounds=50))
    result = algo.train()
    assert result[names.NUM_SAMPLE_ROUNDS] > 1
    assert result[names.NUM_GROUPS_WITHOUT_SIGNAL] > 0
    assert algo.next_prompt > 4
    assert algo.consecutive_empty == 0


def test_overlong_answers_are_punished(build: Make, toy_config: Make) -> None:
    """With overlong_buffer the advantage of a long answer is below that of a short one with equal reward."""
    algo = build(toy_config().training(overlong_buffer=3))
    episodes = algo.env_runner.sample(prompt_indices=[0])
    for episode, length in zip(episodes, (1, 4, 2, 3), strict=True):
        episode.reward = 0.5
        episode.loss_mask = np.arange(len(episode.loss_mask)) < length
        episode.loss_mask = (
            np.resize(episode.loss_mask, length) if len(episode.loss_mask) < length else episode.loss_mask
        )
    short, long = algo.advantages(episodes)[[0, 1]]
    assert short > long


def test_samples_of_other_weights_are_refused(build: Make) -> None:
    """Episodes of another weights version are left out, counted, and end the run when there is nothing else."""
    algo = build()
    algo.env_runner.engine._state.version = 77
    result = algo.train()
    assert result[names.NUM_SAMPLES_REFUSED] == 16
    assert names.LEARNERS not in result
    algo.train()
    with pytest.raises(NoSamplesError, match="refused because of their weights version: 16"):
        algo.train()
