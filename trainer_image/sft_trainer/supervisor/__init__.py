"""The supervisor: one process a pod that starts the workers, watches them, and starts them again.

``node`` is the loop of one pod; ``group`` decides for all of them on index 0; ``causes``, ``generation``, ``ledger``,
``liveness``, ``refusals`` and ``slow_gpus`` are the pure parts of that decision; ``workers``, ``output``, ``http``,
``link`` and ``cgroup`` touch the machine. Nothing here imports torch: a start waits for this process.
"""
