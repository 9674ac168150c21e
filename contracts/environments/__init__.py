"""What environments are told and what they answer: messages, and the calls of the reward service."""
