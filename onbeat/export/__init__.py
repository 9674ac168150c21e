"""What a run leaves in its folder: the chain, checked (`onbeat verify`), and the model, exported (`onbeat export`)."""
