"""The trained model out of a run folder, as a Hugging Face folder or as adapters (`onbeat export`)."""
