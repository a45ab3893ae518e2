"""What a model costs, what its depth weights look like, and what runs say."""
