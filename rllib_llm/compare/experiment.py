"""All cells of a comparison, policy × seed, as one Tune experiment whose curves are on disk as they grow."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import ray
from ray import tune
from ray.tune import CheckpointConfig, ResumeConfig, Stopper

from precision_policies import PolicyError, PrecisionPolicy, load_policy
from precision_policies.errors import MISSING, Violation
from rllib_llm.compare.curves import CurveWriter
from rllib_llm.experiment.errors import ExperimentError
from rllib_llm.experiment.sections import Experiment
from rllib_llm.on_disk.atomic import write_whole
from rllib_llm.on_disk.directories import EXPERIMENT_FILE
from rllib_llm.tracking.entries import metrics_of

if TYPE_CHECKING:
    from rllib_llm.algorithm.config import GRPOConfig

__all__ = ["CellCallback", "ComparisonPlan", "arm_and_seed", "describe_plan", "run_cells"]

# Tune's own directory: at the end of a resumed experiment Tune puts back every *.json that lay in it at the start.
TRIALS = "trials"
_REASON_LENGTH = 300


@dataclass(frozen=True)
class ComparisonPlan:
    """experiment: what all cells share. policies: one arm each, told apart by name. seeds: of every arm.

    iterations: length of every cell. concurrent: most cells at a time; None: as many as Ray can place.
    """

    experiment: Experiment
    policies: tuple[PrecisionPolicy, ...]
    seeds: tuple[int, ...]
    iterations: int
    concurrent: int | None = None

    @property
    def arms(self) -> tuple[str, ...]:
        """Names of the policies that are compared."""
        return tuple(policy.name for policy in self.policies)

    def configs(self) -> list[GRPOConfig]:
        """The validated RLlib config of each arm, with the first seed.

        Raises ExperimentError with the problems of all arms, each once.
        """
        found: list[Violation] = [] if len(self.arms) == len(set(self.arms)) else [self._doubled()]
        if not self.policies:
            found.append(Violation("policies", MISSING, "none given", "name at least one"))
        seeds = self.seeds
        if not seeds or len(set(seeds)) < len(seeds) or not 0 <= min(seeds) <= max(seeds) < 2**32:
            remedy = "name at least one, none twice, none below 0 or above 2**32 - 1"
            found.append(Violation("seeds", list(seeds), "cannot be", remedy))
        if self.iterations < 1:
            found.append(Violation("iterations", self.iterations, "out of range", "must be >= 1"))
        out = []
        for policy in self.policies:
            try:
                out.append(self.cell(policy, self.seeds[0] if self.seeds else 0).to_grpo_config())
            except ExperimentError as error:
                found += [violation for violation in error.violations if violation not in found]
        if found:
            raise ExperimentError(f"comparison of {self.experiment.name!r}", found)
        return out

    def cell(self, policy: PrecisionPolicy, seed: int) -> Experiment:
        """The experiment of one cell."""
        precision = dataclasses.replace(self.experiment.precision, policy=policy.to_dict())
        run = dataclasses.replace(self.experiment.run, seed=seed, iterations=self.iterations)
        return dataclasses.replace(self.experiment, precision=precision, run=run)

    def _doubled(self) -> Violation:
        names = sorted({name for name in self.arms if self.arms.count(name) > 1})
        return Violation("policies", names, "more than once", "give each policy file a name of its own")


def describe_plan(plan: ComparisonPlan, writer: CurveWriter, baseline: str | None) -> None:
    """Writes into ``compare.json`` what is known before the first cell runs."""
    from rllib_llm.tracking.provenance import provenance_tags

    shared = plan.experiment.to_dict()
    del shared["precision"]["policy"], shared["run"]["seed"]
    shared["run"]["iterations"] = plan.iterations
    base = baseline or ("bf16" if "bf16" in plan.arms else plan.arms[0])
    reference = plan.policies[plan.arms.index(base)]
    writer.describe(
        title=f"{plan.experiment.name}: {', '.join(plan.arms)}",
        baseline=base,
        planned={"arms": list(plan.arms), "seeds": list(plan.seeds), "iterations": plan.iterations},
        arms={policy.name: _arm(policy, reference, plan) for policy in plan.policies},
        environment={
            key: value
            for key, value in provenance_tags().items()
            if key.startswith(("version.", "hardware.", "git."))
        },
        config=_yaml(shared),
    )


def run_cells(
    plan: ComparisonPlan,
    config: GRPOConfig,
    directory: Path,
    callbacks: Sequence[tune.Callback],
    *,
    resume: bool = False,
) -> None:
    """Run the cells to their end, or to the interrupt that a CellCallback passes on.

    config: of any cell; policy and seed are searched. resume: go on with what Tune saved in `directory`/trials:
    finished cells stay, the others continue from their last checkpoint, those that an error ended too.
    """
    from rllib_llm.algorithm.grpo import GRPO

    config.precision(policy=tune.grid_search([_named(policy) for policy in plan.policies]))
    config.debugging(seed=tune.grid_search(list(plan.seeds)))
    retry = ResumeConfig.ResumeType.RESUME
    tune.run(
        GRPO,
        name=TRIALS,
        config=config,
        stop=_AfterIterations(plan.iterations),
        storage_path=str(directory),
        checkpoint_config=CheckpointConfig(
            num_to_keep=1, checkpoint_frequency=plan.experiment.run.checkpoint_every, checkpoint_at_end=True
        ),
        max_concurrent_trials=plan.concurrent,
        max_failures=plan.experiment.run.max_failures,
        trial_name_creator=_cell_name,
        trial_dirname_creator=_cell_name,
        callbacks=list(callbacks),
        resume_config=ResumeConfig(errored=retry, unfinished=retry) if resume else None,
        raise_on_failed_trial=False,
        verbose=0,
    )


class _Interrupt(Protocol):
    """requested: whether the user has asked to end."""

    requested: bool


class CellCallback(tune.Callback):
    """Writes every cell's config, curve and status, and turns the first Ctrl-C into checkpoints of all running cells.

    Tune's own handling of SIGINT ends trials where they are; the iterations since their last checkpoint would be lost.
    """

    def __init__(self, plan: ComparisonPlan, writer: CurveWriter, interrupt: _Interrupt) -> None:
        self._cells = {
            (policy.name, seed): plan.cell(policy, seed).to_yaml()
            for policy in plan.policies
            for seed in plan.seeds
        }
        self._writer, self._interrupt = writer, interrupt
        self._saved: set[str] = set()
        self._ended = False

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        cell, directory = arm_and_seed(trial), Path(trial.path)
        self._writer.status(*cell, "running")
        directory.mkdir(parents=True, exist_ok=True)
        write_whole(directory / EXPERIMENT_FILE, self._cells[cell])  # for `rllib-llm eval` of its checkpoints

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        self._writer.row(*arm_and_seed(trial), int(result["training_iteration"]), metrics_of(result))
        if self._interrupt.requested:
            result["should_checkpoint"] = True

    def on_checkpoint(
        self, iteration: int, trials: list[Any], trial: Any, checkpoint: Any, **info: Any
    ) -> None:
        if self._interrupt.requested:
            self._saved.add(trial.trial_id)

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        running = {trial.trial_id for trial in trials if trial.status == "RUNNING"}
        if self._interrupt.requested and running <= self._saved and not self._ended:
            self._ended = True
            os.kill(os.getpid(), signal.SIGUSR1)  # Tune's signal to save the experiment's state and end

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._writer.status(*arm_and_seed(trial), "finished")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        status = "halted" if _halted(trial) else "failed"
        self._writer.status(*arm_and_seed(trial), status, _reason(_error_text(trial)))

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Nothing: the curves are on disk."""


class _AfterIterations(Stopper):
    """Ends every cell after the same number of iterations."""

    def __init__(self, iterations: int) -> None:
        self._iterations = iterations

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return bool(result["training_iteration"] >= self._iterations)

    def stop_all(self) -> bool:
        return False


def arm_and_seed(trial: Any) -> tuple[str, int]:
    """Which cell a Tune trial is."""
    return load_policy(trial.config["precision"]["policy"]).name, int(trial.config["seed"])


def _halted(trial: Any) -> bool:
    """Whether the precision guard ended a failed trial: by the error object that Tune has just stored."""
    from rllib_llm.algorithm.monitor import PrecisionHalt

    file = getattr(trial, "pickled_error_file", None)
    if not file or not Path(file).is_file():
        return False
    try:
        error = ray.cloudpickle.loads(Path(file).read_bytes())  # of this process, a moment ago
    except Exception:  # an error class that cannot be made again is none of ours
        return False
    return isinstance(error, PrecisionHalt) or isinstance(getattr(error, "cause", None), PrecisionHalt)


def _error_text(trial: Any) -> str:
    """What a failed trial raised; empty where it left nothing."""
    file = getattr(trial, "error_file", None)
    return (
        Path(file).read_text(encoding="utf-8", errors="replace").strip()
        if file and Path(file).is_file()
        else ""
    )


# ---- inner workings --------------------------------------------------------------------------------------------------


def _named(policy: PrecisionPolicy) -> Any:
    """The name of a shipped policy, else its content: Tune writes what it searches into names of trials."""
    try:
        shipped = load_policy(policy.name)
    except PolicyError:
        return policy.to_dict()
    return policy.name if shipped.fingerprint == policy.fingerprint else policy.to_dict()


def _cell_name(trial: Any) -> str:
    arm, seed = arm_and_seed(trial)
    return f"{arm}_seed{seed}"


def _arm(policy: PrecisionPolicy, baseline: PrecisionPolicy, plan: ComparisonPlan) -> dict[str, Any]:
    from rllib_llm.models.checkpoint import load_config
    from rllib_llm.models.paths import resolve_model_path

    path = plan.experiment.model.path
    model = load_config(resolve_model_path(path)) if path else None
    adapter = plan.experiment.model.adapter
    spec = None if adapter is None else adapter.spec()
    return {
        "policy": policy.name,
        "fingerprint": policy.fingerprint,
        "plan_hash": policy.resolve(model, spec).hash if model is not None else "",
        "differences": [f"{d.key}: {d.ours} (not {d.theirs})" for d in policy.diff(baseline)],
        "definition": policy.to_dict(),
    }


def _reason(text: str) -> str:
    """The last line of a traceback that is no frame: the error itself."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith((" ", "\t"))]
    return (lines[-1] if lines else "no error text")[:_REASON_LENGTH]


def _yaml(tree: Mapping[str, Any]) -> str:
    import yaml

    return yaml.safe_dump(dict(tree), sort_keys=False, allow_unicode=True)
