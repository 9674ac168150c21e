"""A job's pipeline as discrete events: generators and a trainer around the fence's window, on processors or devices."""
