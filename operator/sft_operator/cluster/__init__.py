"""What talks to the cluster: to the API server, to pods, and to the platform's store."""
