"""What is known of the cluster, reduced to what decisions need. No I/O, no clock."""
