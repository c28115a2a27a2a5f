"""Learning from rewards: sampling completions, rewards, advantages and the policy loss."""
