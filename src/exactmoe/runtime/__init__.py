"""What a call runs in: the workspace arena of each device."""
