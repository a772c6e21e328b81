"""The data of a job: prepare it ahead, and see how much there is, what a step reads, and what is corrupt."""
