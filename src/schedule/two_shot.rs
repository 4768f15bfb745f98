//! two_shot
