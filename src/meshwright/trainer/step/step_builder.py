"""TRAINER_STEP: the trainer's own step, for a tracer that is given what to trace; needs no torch."""

from meshwright.tracer.programs.job_steps import StepBuilder

_MODULE = "meshwright.trainer.step.build_step"
TRAINER_STEP = StepBuilder(f"{_MODULE}:build_step", f"{_MODULE}:build_part_of_step")
