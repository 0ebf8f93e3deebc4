"""What trains: the RLModule around the language model, and the Learner that updates it."""
