"""The pixel system EDELINE."""
