"""Independent replicas of a model: a coordinator, quorums for each step, sums that survive a lost replica, recovery."""
