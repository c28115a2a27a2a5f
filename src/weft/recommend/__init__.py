"""The task "recommend": recommenders on records with columns of ids, numbers, labels and times."""
