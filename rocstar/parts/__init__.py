"""What a run is put together from: attempts, engines, models, memory."""
