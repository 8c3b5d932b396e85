"""Training: joins plan, comm, model and tasks."""
