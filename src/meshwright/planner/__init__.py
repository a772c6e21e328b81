"""Space, feasibility and search: Job + Cluster -> Plan.

Empty until the planner is built.
"""
