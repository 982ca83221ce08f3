"""From a checkpoint to an engine that is ready for its first step."""
