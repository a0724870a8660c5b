"""The launcher ``ray``: one ``fit()`` of Ray Train over the raylets of a job's pods. What imports Ray is here alone."""
