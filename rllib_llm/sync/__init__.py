"""Moving weights from learner to engine: quantised once, verified before they are applied, receipted
after."""
