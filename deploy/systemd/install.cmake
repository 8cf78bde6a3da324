# Run by cmake --install. systemd reads all of these below /usr and /usr/local.
set(bin ${CMAKE_INSTALL_PREFIX}/bin)
set(etc ${CMAKE_INSTALL_PREFIX}/etc)
if(CMAKE_INSTALL_PREFIX MATCHES "^/usr(/local)?$")
  set(etc /etc)
endif()

configure_file(${source}/vrambroker.service.in ${scratch}/installed/vrambroker.service @ONLY)
file(INSTALL ${scratch}/installed/vrambroker.service DESTINATION ${CMAKE_INSTALL_PREFIX}/lib/systemd/system)
file(INSTALL ${source}/vrambroker.sysusers DESTINATION ${CMAKE_INSTALL_PREFIX}/lib/sysusers.d RENAME vrambroker.conf)
file(INSTALL ${source}/vrambroker.tmpfiles DESTINATION ${CMAKE_INSTALL_PREFIX}/lib/tmpfiles.d RENAME vrambroker.conf)

set(configuration ${etc}/vrambroker/vrambroker.textproto)
if(EXISTS $ENV{DESTDIR}${configuration})
  message(STATUS "Kept: ${configuration}")
else()
  file(INSTALL ${source}/../vrambroker.textproto DESTINATION ${etc}/vrambroker)
endif()
