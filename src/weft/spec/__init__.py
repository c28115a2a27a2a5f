"""What the user says, as pure data without torch: plan and rules, model shape, cluster, layout, config."""
