"""Pipeline schedules: the order of each rank's actions, and the rules that it must keep."""
