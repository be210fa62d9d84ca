"""What the step of a pipeline costs by the planner's model: sections of a model, ticks, memory."""
