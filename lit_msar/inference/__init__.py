"""Using a trained model: load, generate."""
