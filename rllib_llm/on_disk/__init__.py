"""What directories that we wrote say of themselves: experiments, checkpoints, exported models."""
