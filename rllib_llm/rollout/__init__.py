"""From prompts to finished episodes: RLlib's environment runner, the play of conversations, prompts as token ids."""
