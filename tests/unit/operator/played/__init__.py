"""A small cluster for the lives of a job: its API server, its controllers, its nodes, and what trains on them."""
