"""What a policy learnt: numbers and figures of finished runs (launch.analyze)."""
