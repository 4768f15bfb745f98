//! one_shot
