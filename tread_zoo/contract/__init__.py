"""What every backbone keeps to: its base class, the frame of a route, layers that many share."""
