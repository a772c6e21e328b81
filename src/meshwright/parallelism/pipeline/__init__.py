"""Pipeline parallelism: stages, execution of schedules, gradient reductions."""
