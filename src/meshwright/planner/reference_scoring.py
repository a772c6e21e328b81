"""scoring_s(): the seconds in which a reference scores all pairs before the first step of preference optimisation.

    seconds = sequences x (step - what forward has not) x forward FLOPs / FLOPs of the step / sequences of a step
              x (2 pp - 1) / pp

Forward has no recomputation, repeated backward, optimizer update, nor the bubble of a step. Pipelines take pp
microbatches at a time (trainer/step/score_pairs.py), and so wait for pp - 1 more. Of collectives it has the same share
as of FLOPs: of two gathers and a reduction one gather. Ignored: that the share of memory-bound work may be another.
"""

from meshwright.planner.request import PlanRequest
from meshwright.spec.run.layout_plan import Candidate


def scoring_s(candidate: Candidate, request: PlanRequest, num_sequences: int) -> float:
    """Return the seconds of one forward of so many sequences in a candidate's layout."""
    step, layout, workload = candidate.estimate.step, candidate.layout, request.workload
    model = request.setup.trained_model
    forward = sum(group.count * group.forward_flops_per_token(workload.seq_len) for group in model.groups)
    of_backward_s = step.recomputation_s + step.repeated_backward_s + step.optimizer_s + step.pipeline_bubble_s
    passes_s = step.total_s - of_backward_s
    at_once = layout.dp * layout.pp * layout.microbatch_size
    # The last rows are padding.
    num_rows = -(-num_sequences // at_once) * at_once
    of_step = passes_s * forward / model.flops_per_token(workload.seq_len) / workload.global_batch_size
    return num_rows * of_step * (2 * layout.pp - 1) / layout.pp
