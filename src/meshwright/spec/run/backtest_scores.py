"""Prediction, Score, Backtest: what was predicted of measured runs, and how far off it was."""

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat

from meshwright.spec.frozen import Frozen


class Prediction(Frozen):
    """What is predicted of one measured run; unknown is None."""

    id: str
    """Name of the row."""
    source: str
    """Family of sources that the run was published in."""
    stack: str
    """Stack whose constants were taken; it begins with generic where the row's own is not known."""
    predicted_step_time_s: PositiveFloat | None = None
    """Seconds of a step."""
    relative_error: NonNegativeFloat | None = None
    """Half width of the 80 % interval as a share of the step."""
    predicted_peak_bytes: NonNegativeFloat | None = None
    """Peak memory of the fullest rank: allocated or nvidia-smi's where mem_kind says so, else reserved."""
    fits: bool | None = None
    """Whether reserved bytes are no more than the device has besides context and communication."""
    assumed: tuple[str, ...] = ()
    """What was taken for granted where the row says nothing."""
    measured_step_time_s: PositiveFloat | None = None
    """Seconds of a step, stated or from tokens per second."""
    measured_peak_bytes: PositiveFloat | None = None
    """Stated peak memory."""
    memory_kind: str = ""
    """The row's mem_kind: allocated, reserved, smi or empty."""
    null_step_time_s: PositiveFloat | None = None
    """Seconds of a step by the null model."""
    unsupported_reason: str = ""
    """Why there is no prediction, or no comparison."""

    @property
    def error(self) -> float | None:
        """Return predicted over measured step time, less 1; None where either is unknown."""
        if self.predicted_step_time_s is None or self.measured_step_time_s is None:
            return None
        return self.predicted_step_time_s / self.measured_step_time_s - 1


class _Errors(Frozen):
    num_runs: NonNegativeInt
    """Runs that were compared."""
    median: NonNegativeFloat
    """Median of absolute errors."""
    mean: NonNegativeFloat
    """Mean of absolute errors."""
    bias: float
    """Mean error: positive is too slow, or too large, a prediction."""


class Score(_Errors):
    """Errors of some runs' predicted step times, as shares of the measured ones."""

    name: str
    """The source, or what is scored."""
    within_5: NonNegativeFloat
    """Share of runs within 5 %."""
    within_10: NonNegativeFloat
    """Share of runs within 10 %."""
    within_20: NonNegativeFloat
    """Share of runs within 20 %."""
    coverage: NonNegativeFloat | None = None
    """Share of runs whose measured step lies in the 80 % interval."""
    null_median: NonNegativeFloat | None = None
    """Median of the null model's absolute errors."""
    null_mean: NonNegativeFloat | None = None
    """Mean of the null model's absolute errors."""


class MemoryScore(_Errors):
    """Errors of predicted peaks of memory of one kind."""

    kind: str
    """allocated, reserved, smi, or not stated (compared with reserved)."""


class MisplacedRun(Frozen):
    """A measured layout that predictions put on the wrong side of others of its group."""

    id: str
    """Of the run, the first one where a layout was measured again."""
    num_wrong: NonNegativeInt
    """Pairs that it is in and that are in the wrong order."""
    num_pairs: NonNegativeInt
    """Pairs that it is in, measured more than 5 % apart."""
    error: float
    """Predicted over measured time, less 1."""


class PickingScore(Frozen):
    """How well predictions order measured layouts of one model, cluster and batch."""

    num_groups: NonNegativeInt
    """Groups of at least five layouts."""
    median_regret: NonNegativeFloat
    """Measured time of the layout predicted to be fastest over that of the fastest, less 1: median of groups."""
    worst_regret: NonNegativeFloat
    """The same of the worst group."""
    worst_group: str
    """Which that is."""
    kendall_tau: float
    """Pairs in the right order less those in the wrong one, as a share; pairs measured within 5 % left out."""
    most_misplaced: tuple[MisplacedRun, ...] = ()
    """Those in the most wrong pairs, at most four."""
    tau_without_them: float = 1.0
    """Kendall tau of all other layouts."""


class Backtest(Frozen):
    """The scores of one way to predict some runs."""

    title: str
    """What was known when predicting."""
    num_rows: NonNegativeInt
    """Rows of the file."""
    num_unsupported: NonNegativeInt
    """Rows without a prediction."""
    num_constants: NonNegativeInt
    """Constants that were fitted, for all stacks."""
    num_stack_constants: NonNegativeInt
    """Of these, constants of single stacks."""
    num_fitted_runs: NonNegativeInt
    """Runs that they were fitted on."""
    overall: Score | None = None
    """Mean of the sources' scores; None where no row has a measured time."""
    sources: tuple[Score, ...] = ()
    """Each source; those of fewer than four runs are one."""
    memory: tuple[MemoryScore, ...] = ()
    """Each kind of memory."""
    fits: NonNegativeFloat | None = None
    """Share of the predicted runs that are predicted to fit; all of them did run."""
    picking: PickingScore | None = None
    """None without a group of five layouts."""
