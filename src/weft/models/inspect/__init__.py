"""Reading any model: blocks, layers, layouts, cost. Changes nothing."""
