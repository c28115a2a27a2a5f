"""What computes, behind `weft.train.engine`. A run names its engine, so nothing below imports one."""
